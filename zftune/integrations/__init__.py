"""What zftune brings to DeepSpeed, Hugging Face and FSDP2."""
