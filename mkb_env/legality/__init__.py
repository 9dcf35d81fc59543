"""What a submission may not contain."""
