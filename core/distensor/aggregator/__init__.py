"""The aggregation server: takes one copy of each replica's update and hands everybody the set of all."""
