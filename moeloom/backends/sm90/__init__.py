"""The SM90 backend (H100, H200), in the making: dispatch and combine between the GPUs of a node. No Runtime has it yet.

What is here launches kernels on the current stream and neither reads nor waits. A process is one rank of several, or
plays several ranks on one GPU (tests, benchmarks): the same functions, with one end of the exchange or with several.
"""
