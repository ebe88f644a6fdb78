"""Study 005: DeepSpeed's ZeRO-Offload and ZenFlow beside this runtime."""
