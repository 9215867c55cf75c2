"""Trainings of many adapters in one bank: sweeps, searches, and the members of fleets."""
