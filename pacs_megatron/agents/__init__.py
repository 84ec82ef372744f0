"""Agents: trajectories of several turns with tools, in worker processes."""
