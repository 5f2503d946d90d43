"""The largest calls of the scripts that the app sends."""
