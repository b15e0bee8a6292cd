"""The same checks on CUDA tensors. Each is parametrised by device, so that nothing here is code that never ran."""
