"""The workers of a parallel stage: process groups and shared memory."""
