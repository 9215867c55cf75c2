"""Distillation: who teaches, what they say, and how a student learns it."""
