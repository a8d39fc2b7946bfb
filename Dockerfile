# Dockerfile -- the generator and all that the tests need: docker build -t zero . && docker run zero ./run test
FROM debian:12
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates git gcc libc6-dev
COPY . /zero
WORKDIR /zero
RUN ./run setup
CMD ["gen/zgen", "--help"]
