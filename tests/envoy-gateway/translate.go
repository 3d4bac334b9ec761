// Prints, as JSON, Envoy Gateway's translation of the Kubernetes objects on standard input: its verdict on each object, and
// the xDS resources that it would send.
//
// `egctl x translate` does the same with two gaps: it has no module cache, so it refuses every EnvoyExtensionPolicy with
// wasm, and it knows no endpoints. Here a stub replaces the cache, and every Service has two pods. The translators,
// the schemas and the defaults are Envoy Gateway's own.
//
// They are internal packages, so `refresh_envoy_gateway.rs` compiles this file as part of that module.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"

	resourcev3 "github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"google.golang.org/protobuf/encoding/protojson"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	gwapiv1 "sigs.k8s.io/gateway-api/apis/v1"

	egv1a1 "github.com/envoyproxy/gateway/api/v1alpha1"
	"github.com/envoyproxy/gateway/internal/gatewayapi"
	"github.com/envoyproxy/gateway/internal/gatewayapi/resource"
	"github.com/envoyproxy/gateway/internal/logging"
	"github.com/envoyproxy/gateway/internal/wasm"
	"github.com/envoyproxy/gateway/internal/xds/translator"
)

// The namespace in which Envoy Gateway runs.
const namespace = "envoy-gateway-system"

// modules is a stub for the cache that fetches wasm and serves it to Envoy.
type modules struct{}

func (modules) Get(url string, _ *wasm.GetOptions) (string, string, error) {
	return "https://envoy-gateway:18002/module.wasm", fmt.Sprintf("checksum of %s", url), nil
}

func (modules) Start(context.Context) {}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	input, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	objects, err := resource.LoadResourcesFromYAMLBytes(input, false, nil)
	if err != nil {
		return err
	}
	addEndpoints(objects)
	addCertificate(objects, namespace)
	// The loader assumes that every EnvoyProxy belongs to the class. Here it belongs to the Gateway.
	objects.EnvoyProxiesForGateways = append(objects.EnvoyProxiesForGateways, objects.EnvoyProxyForGatewayClass)
	objects.EnvoyProxyForGatewayClass = nil

	logger := logging.DefaultLogger(os.Stderr, egv1a1.LogLevelError)
	gateway := &gatewayapi.Translator{
		GatewayControllerName:   string(objects.GatewayClass.Spec.ControllerName),
		GatewayClassName:        gwapiv1.ObjectName(objects.GatewayClass.Name),
		EnvoyPatchPolicyEnabled: len(objects.EnvoyPatchPolicies) > 0,
		ControllerNamespace:     namespace,
		WasmCache:               modules{},
		Logger:                  logger,
	}
	translated, err := gateway.Translate(context.Background(), objects)
	if err != nil {
		return err
	}
	if len(translated.XdsIR) != 1 {
		return fmt.Errorf("%d Gateways, not one", len(translated.XdsIR))
	}
	result := map[string]any{}
	for _, ir := range translated.XdsIR {
		xds := &translator.Translator{
			ControllerNamespace: gateway.ControllerNamespace,
			FilterOrder:         ir.FilterOrder,
			Logger:              logger,
		}
		table, err := xds.Translate(context.Background(), ir)
		if err != nil {
			return err
		}
		for kind, found := range table.XdsResources {
			if kind == resourcev3.SecretType {
				continue
			}
			list := []any{}
			for _, one := range found {
				text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(one)
				if err != nil {
					return err
				}
				// Through a map, because protojson inserts spaces at random.
				var value any
				if err := json.Unmarshal(text, &value); err != nil {
					return err
				}
				list = append(list, value)
			}
			result[kind] = list
		}
	}
	// Last, because patches are judged when they are applied.
	result["conditions"] = conditions(translated)
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", " ")
	return encoder.Encode(result)
}

// addCertificate adds a stub for the certificate that Envoy presents to Envoy Gateway. It is not printed.
func addCertificate(objects *resource.Resources, namespace string) {
	objects.Secrets = append(objects.Secrets, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "envoy"},
		Data:       map[string][]byte{corev1.TLSCertKey: {'-'}, corev1.TLSPrivateKeyKey: {'-'}, "ca.crt": {'-'}},
	})
}

// addEndpoints gives every port of every Service two pods: 10.0.0.1 and 10.0.0.2.
func addEndpoints(objects *resource.Resources) {
	for _, service := range objects.Services {
		service.Spec.ClusterIP = "10.96.0.1"
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: service.Namespace,
				Name:      service.Name,
				Labels:    map[string]string{discoveryv1.LabelServiceName: service.Name},
			},
			AddressType: discoveryv1.AddressTypeIPv4,
		}
		for _, port := range service.Spec.Ports {
			slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{
				Name: ptr.To(port.Name), Port: ptr.To(port.TargetPort.IntVal),
				Protocol: ptr.To(corev1.ProtocolTCP), AppProtocol: port.AppProtocol,
			})
		}
		for _, address := range []string{"10.0.0.1", "10.0.0.2"} {
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
				Addresses:  []string{address},
				Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true)},
			})
		}
		objects.EndpointSlices = append(objects.EndpointSlices, slice)
	}
}

// conditions lists what Envoy Gateway would write into the status of each object, as "Type=Status".
func conditions(translated *gatewayapi.TranslateResult) map[string][]string {
	found := map[string][]string{}
	collect := func(kind string, name string, lists ...[]metav1.Condition) {
		key := kind + " " + name
		for _, condition := range slices.Concat(lists...) {
			text := fmt.Sprintf("%s=%s", condition.Type, condition.Status)
			if condition.Status != metav1.ConditionTrue {
				text += ": " + condition.Message
			}
			found[key] = append(found[key], text)
		}
		slices.Sort(found[key])
		found[key] = slices.Compact(found[key])
	}
	policy := func(kind string, name string, status gwapiv1.PolicyStatus) {
		found[kind+" "+name] = []string{}
		for _, ancestor := range status.Ancestors {
			collect(kind, name, ancestor.Conditions)
		}
	}
	for _, it := range translated.Gateways {
		for _, listener := range it.Status.Listeners {
			collect("Gateway", it.Name, listener.Conditions)
		}
	}
	for _, it := range translated.HTTPRoutes {
		for _, parent := range it.Status.Parents {
			collect("HTTPRoute", it.Name, parent.Conditions)
		}
	}
	for _, it := range translated.BackendTrafficPolicies {
		policy("BackendTrafficPolicy", it.Name, it.Status)
	}
	for _, it := range translated.ClientTrafficPolicies {
		policy("ClientTrafficPolicy", it.Name, it.Status)
	}
	for _, it := range translated.EnvoyExtensionPolicies {
		policy("EnvoyExtensionPolicy", it.Name, it.Status)
	}
	for _, it := range translated.SecurityPolicies {
		policy("SecurityPolicy", it.Name, it.Status)
	}
	for _, it := range translated.EnvoyPatchPolicies {
		policy("EnvoyPatchPolicy", it.Name, it.Status)
	}
	return found
}
