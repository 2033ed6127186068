"""Feeds of engine events that clients poll: trtllm-serve's endpoints."""
