"""Where the parameters of each unit rest: whole, or as the shards that FSDP2 keeps."""
