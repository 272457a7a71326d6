"""One training in several processes, as torchrun starts them: one device each, under torch's DDP or FSDP2."""
