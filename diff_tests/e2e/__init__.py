"""`kvoracle e2e`: the request matrix in a real engine, and a verdict for each request."""
