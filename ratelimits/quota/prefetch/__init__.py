"""Take permits for several requests in one call, spend them without asking Redis, and count the requests."""
