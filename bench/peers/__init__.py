"""The servers that trioserve is measured beside, each in an environment of its own."""
