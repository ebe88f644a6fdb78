"""Checkpoints from one form into another: DeepSpeed's ZeRO-1 and ZeRO-2, ours, and a plain torch AdamW's.

`converting` has the two functions, `command` is `zftune checkpoint`. Nothing here imports DeepSpeed, builds the model
or needs a GPU.
"""
