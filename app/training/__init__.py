"""How a policy learns: status and control, rewards, batch caps, the KL guard, rollouts and reward models."""
