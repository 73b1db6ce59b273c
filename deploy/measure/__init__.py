"""Timing on a device: `bench` judges whole models, `tune` chooses layers; both share sessions, turns and statistics."""
