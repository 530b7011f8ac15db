"""How the stages are done: one folder per backend, all of them behind `base.Backend`."""
