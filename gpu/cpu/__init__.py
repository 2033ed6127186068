"""Steps on the CPU: compiled C++ where it can be built and the processor has it, else torch."""
