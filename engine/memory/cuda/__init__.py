"""CUDA's memory as resources of the house. Nothing here is imported on a machine that runs on the CPU."""
