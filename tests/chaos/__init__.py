"""A fleet, a seeded script that breaks its parts, and the count of what came of it: nothing lost, nothing left over."""
