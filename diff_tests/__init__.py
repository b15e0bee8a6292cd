"""Campaigns, the gate, explanations, live checks and workloads: everything around the model and the laws."""

__version__ = "0.1.0"
