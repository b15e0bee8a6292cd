"""Public request traces through the model, or through the model and the real scheduler side by side."""
