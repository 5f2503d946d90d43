"""Find the rates that a project has written for other libraries, and make rules of them."""
