"""Learning from rewards of answers that a model writes itself: rollouts, their advantages, and their loss."""
