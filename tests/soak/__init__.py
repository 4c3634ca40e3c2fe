"""One daemon living through everything at random, for as long as wanted."""
