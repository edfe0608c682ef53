"""Operations: each folder holds a contract, its reference, faster versions and shared cases."""
