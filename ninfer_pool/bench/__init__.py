"""What the pool's own operations cost, beside the floor of one hash and one comparison."""
