"""Distillation: teachers, their outputs and caches, students and their losses."""
