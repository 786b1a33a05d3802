"""Fleets for real: Ray and Slurm on this machine."""
