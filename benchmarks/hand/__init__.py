"""Hand-written training: raw collectives on flat buffers, no DDP, FSDP, DTensor or pipelining API."""
