"""Tasks, resources and their order: one vocabulary for tiles in a kernel and for chunks across kernels and nodes."""
