"""The CPU backend: it defines what the contract means. Shared memory within a node, gloo between nodes."""
