"""What is given to the rules and what must fire; at least one of each for every alert."""
