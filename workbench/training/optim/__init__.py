"""Optimizers, schedules, averages of weights, gradient noise."""
