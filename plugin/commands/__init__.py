"""The commands of `pagedmla`, a module each: its options, its examples, and what it says of wrong usage."""
