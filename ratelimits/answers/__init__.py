"""The answers to requests: whether they are admitted, and what the client gets."""
