"""The engine core of vtserve: loads NVFP4 models, schedules requests and steps the model."""
