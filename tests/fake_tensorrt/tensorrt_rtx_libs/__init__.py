"""The libraries' package: the tests put a file where the real one has its library."""
