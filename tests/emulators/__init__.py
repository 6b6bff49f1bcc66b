"""Stand-ins for services that tests cannot reach; each is a real server in a process of its own."""
