"""Real engines and servers: traces of the probe connector, and what they say."""
