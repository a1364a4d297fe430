"""What a plan reads of DeepSpeed's runtime."""
