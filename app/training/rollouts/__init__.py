"""Rollouts: replies that the trainer requests itself, by group sampling and by plans over prompt sets."""
