//! Rows: discovery, request plane, event plane.

use std::path::PathBuf;
use std::time::Duration;

use crate::choice::{DiscoveryBackend, EventPlane, PlaneCodec, RequestPlane};
use crate::command::Scope;
use crate::rule_text::{ETCD, HOST, NATS};
use crate::spec::{Group, options, var};

const PLANES_SCOPE: Scope = Scope::FRONTEND
    .and(Scope::ROUTER)
    .and(Scope::MOCKER)
    .and(Scope::DOCTOR);

options! { PLANES_ROWS, Group::Planes, PLANES_SCOPE;

    /// How workers are discovered.
    DISCOVERY_BACKEND: DiscoveryBackend = "discovery-backend" =>
        env(&[var("DYN_DISCOVERY_BACKEND")]).default("etcd")
        .default_note("etcd; static with --worker").common()
        .effective();

    /// Root directory of `file` discovery.
    FILE_KV: Option<PathBuf> = "file-kv" =>
        env(&[var("DYN_FILE_KV")]).default_note("dynamo_store_kv in the temporary directory")
        .metavar("DIR").effective();

    /// Transport on which a worker takes requests; a frontend follows what each of its workers announces.
    REQUEST_PLANE: RequestPlane = "request-plane" =>
        env(&[var("DYN_REQUEST_PLANE")]).default("tcp").effective();

    /// Transport of KV events and load reports.
    ///
    /// For workers that this process runs, and for what a frontend tells other replicas. A frontend listens to each worker where that
    /// worker says that it publishes.
    EVENT_PLANE: EventPlane = "event-plane" =>
        env(&[var("DYN_EVENT_PLANE")]).default("nats")
        .default_note("nats with etcd or kubernetes discovery if NATS_SERVER is set, else zmq")
        .effective();

    /// Namespace to discover workers in.
    NAMESPACE: Option<String> = "namespace" =>
        env(&[var("DYN_NAMESPACE")])
        .default_note("all; the endpoint's own in the standalone router").metavar("NAME")
        .effective();

    /// Discover workers in all namespaces with this prefix; takes precedence over `--namespace`.
    NAMESPACE_PREFIX: Option<String> = "namespace-prefix" =>
        scope(Scope::FRONTEND.and(Scope::DOCTOR)).env(&[var("DYN_NAMESPACE_PREFIX")]).metavar("NAME")
        .effective();

    /// Address of the NATS server; several are separated by commas.
    NATS_SERVER: String = "nats-server" =>
        env(&[var("NATS_SERVER")]).default("nats://localhost:4222").rule(&NATS).effective();

    /// Certificate authority of the NATS server, instead of those of the system.
    NATS_TLS_CA_CERT_PATH: Option<PathBuf> = "nats-tls-ca-cert-path" =>
        env(&[var("NATS_TLS_CA_CERT_PATH")]).metavar("FILE").effective();

    /// Do not verify the certificate of the NATS server.
    NATS_TLS_INSECURE: bool = "nats-tls-insecure" =>
        env(&[var("NATS_TLS_INSECURE")]).default("false").effective();

    /// Retention time of the JetStream stream.
    ///
    /// A router with `--router-durable-kv-events` takes a snapshot before the first event is that old.
    NATS_STREAM_MAX_AGE: Duration = "nats-stream-max-age" =>
        env(&[var("DYN_NATS_STREAM_MAX_AGE")]).default("3600").positive().metavar("SECONDS").effective();

    /// Addresses of etcd, separated by commas.
    ETCD_ENDPOINTS: String = "etcd-endpoints" =>
        env(&[var("ETCD_ENDPOINTS")]).default("http://localhost:2379").rule(&ETCD).effective();

    /// Time that this process's records stay in etcd without a sign of life from it.
    ETCD_LEASE_TTL: u64 = "etcd-lease-ttl" =>
        env(&[var("ETCD_LEASE_TTL")]).default("30").ints(1, 86_400).metavar("SECONDS").effective();

    /// User name for etcd.
    ETCD_AUTH_USERNAME: Option<String> = "etcd-auth-username" =>
        env(&[var("ETCD_AUTH_USERNAME")]).metavar("NAME").effective();

    /// Password for etcd. Not a flag: other users of a machine can read command lines.
    ETCD_AUTH_PASSWORD: Option<String> = "etcd-auth-password" =>
        env(&[var("ETCD_AUTH_PASSWORD")]).secret().effective();

    /// Certificate authority of etcd.
    ETCD_AUTH_CA: Option<PathBuf> = "etcd-auth-ca" =>
        env(&[var("ETCD_AUTH_CA")]).metavar("FILE").effective();

    /// Client certificate for etcd; needs the key too.
    ETCD_AUTH_CLIENT_CERT: Option<PathBuf> = "etcd-auth-client-cert" =>
        env(&[var("ETCD_AUTH_CLIENT_CERT")]).metavar("FILE").effective();

    /// Key of that certificate.
    ETCD_AUTH_CLIENT_KEY: Option<PathBuf> = "etcd-auth-client-key" =>
        env(&[var("ETCD_AUTH_CLIENT_KEY")]).metavar("FILE").effective();

    /// Kubeconfig files that lead to the API server, separated by colons.
    KUBECONFIG: Option<String> = "kubeconfig" =>
        env(&[var("KUBECONFIG")]).default_note("the service account of this pod").metavar("FILE").effective();

    /// Context of the kubeconfig.
    KUBE_CONTEXT: Option<String> = "kube-context" =>
        env(&[var("KVASIR_KUBE_CONTEXT")]).default_note("its current one").metavar("NAME").effective();

    /// Kubernetes namespace in which workers are.
    KUBE_NAMESPACE: Option<String> = "kube-namespace" =>
        env(&[var("KVASIR_KUBE_NAMESPACE"), var("POD_NAMESPACE")])
        .default_note("that of the credentials").metavar("NAME").effective();

    /// Name of this pod, of which a worker's id follows in `kubernetes` discovery.
    POD_NAME: Option<String> = "pod-name" => env(&[var("POD_NAME")]).metavar("NAME").effective();

    /// Unique id of this pod, which owns what its worker announces in `kubernetes` discovery.
    POD_UID: Option<String> = "pod-uid" => env(&[var("POD_UID")]).metavar("UID").effective();

    /// Address of the API server as seen from a pod. Kubernetes sets the variable.
    KUBERNETES_SERVICE_HOST: Option<String> = "kubernetes-service-host" =>
        env(&[var("KUBERNETES_SERVICE_HOST")]).default_note("kubernetes.default.svc").rule(&HOST).effective();

    /// Port of the API server as seen from a pod. Kubernetes sets the variable.
    KUBERNETES_SERVICE_PORT: u16 = "kubernetes-service-port" =>
        env(&[var("KUBERNETES_SERVICE_PORT")]).default("443").ints(1, 65535).effective();

    /// Encoding of events.
    ///
    /// Workers of Dynamo 1.6.1 publish MessagePack on ZeroMQ and on NATS whatever it says, and so do ours.
    EVENT_PLANE_CODEC: Option<PlaneCodec> = "event-plane-codec" =>
        env(&[var("DYN_EVENT_PLANE_CODEC")]).default_note("msgpack")
        .ignored("leave it out: events are MessagePack, as those of Dynamo 1.6.1 are");

    /// Encoding of requests, announced by each endpoint.
    REQUEST_PLANE_CODEC: PlaneCodec = "request-plane-codec" =>
        env(&[var("DYN_REQUEST_PLANE_CODEC")]).default("msgpack").effective();

    /// Host by which a frontend is reached by the answers of workers, and a worker by requests.
    TCP_RPC_HOST: Option<String> = "tcp-rpc-host" =>
        env(&[var("DYN_TCP_RPC_HOST")]).default_note("found by itself").rule(&HOST).effective();

    /// Port of that host; 0 takes any free one.
    TCP_RPC_PORT: u16 = "tcp-rpc-port" =>
        env(&[var("DYN_TCP_RPC_PORT")]).default("0").metavar("PORT").effective();

    /// Largest message on the request plane, in bytes.
    TCP_MAX_MESSAGE_SIZE: u64 = "tcp-max-message-size" =>
        env(&[var("DYN_TCP_MAX_MESSAGE_SIZE")]).default("33554432").ints(1024, 1 << 40).effective();

    /// Time to wait for a worker to accept a request.
    TCP_REQUEST_TIMEOUT: Duration = "tcp-request-timeout" =>
        env(&[var("DYN_TCP_REQUEST_TIMEOUT")]).default("10").metavar("SECONDS").effective();

    /// Time to wait for a connection to a worker.
    TCP_CONNECT_TIMEOUT: Duration = "tcp-connect-timeout" =>
        env(&[var("DYN_TCP_CONNECT_TIMEOUT")]).default("3").metavar("SECONDS").effective();

    /// Most connections to each worker: every serving thread has one of its own, as far as they go.
    TCP_POOL_SIZE: u32 = "tcp-pool-size" =>
        env(&[var("DYN_TCP_POOL_SIZE")]).default("50").ints(1, 65_536).effective();

    /// Messages buffered for each connection.
    TCP_CHANNEL_BUFFER: u32 = "tcp-channel-buffer" =>
        env(&[var("DYN_TCP_CHANNEL_BUFFER")]).default("100").ints(1, 1 << 20).effective();

    /// Certificate that a worker shows on the TCP request plane; needs the key too.
    TCP_TLS_CERT_PATH: Option<PathBuf> = "tcp-tls-cert-path" =>
        env(&[var("DYN_TCP_TLS_CERT_PATH")]).metavar("FILE").effective();

    /// Key of that certificate.
    TCP_TLS_KEY_PATH: Option<PathBuf> = "tcp-tls-key-path" =>
        env(&[var("DYN_TCP_TLS_KEY_PATH")]).metavar("FILE").effective();

    /// Certificate authority of workers on the TCP request plane; with it a frontend speaks TLS to them.
    TCP_TLS_CA_CERT_PATH: Option<PathBuf> = "tcp-tls-ca-cert-path" =>
        env(&[var("DYN_TCP_TLS_CA_CERT_PATH")]).metavar("FILE").effective();

    /// Host by which others reach the event sockets of this process.
    EVENT_PLANE_HOST: Option<String> = "event-plane-host" =>
        scope(Scope::FRONTEND.and(Scope::ROUTER).and(Scope::MOCKER)).env(&[var("DYN_EVENT_PLANE_HOST")])
        .default_note("that of --tcp-rpc-host").rule(&HOST).effective();
}
