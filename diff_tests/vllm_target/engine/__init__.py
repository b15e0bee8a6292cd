"""The real engine: started, driven and painted by us, in a child process or behind its HTTP server."""
