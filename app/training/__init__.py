"""How a policy learns: state, control, rewards, batch caps, the KL guard, rollouts and reward models."""
