"""From feedback to rewards and samples."""
