"""Find out what works on the project's own Redis server, what does not, why, and what would change it."""
