"""The package of NVIDIA Apex."""
