"""Quantises a model to NVFP4 in ModelOpt's checkpoint format.

::

    GGUF file ──gguf_source──┐
                             ▼
    HF directory ───────► Source ──► recipe ──► CheckpointWriter ──► ModelOpt directory
                                       ▲
                  calibration text ────┘  (one pass of the model, quantised while it runs)
"""
