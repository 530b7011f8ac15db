"""experts on CPUs: products in fp32, since those in BF16 are 3 to 9 times slower there from 64 rows up."""

from moeloom.backends.plain_experts import Expert, experts, experts_backward

__all__ = ["Expert", "experts", "experts_backward"]
