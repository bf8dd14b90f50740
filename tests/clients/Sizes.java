// Creates jobs of all sizes with java.net.http, which offers h2c, whole and in pieces: java Sizes.java URL TOKEN SIZE...
import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.List;

public class Sizes {
    public static void main(String[] arguments) throws Exception {
        var client = HttpClient.newHttpClient();
        for (int n = 2; n < arguments.length; n++) {
            var text = "x".repeat(Integer.parseInt(arguments[n]));
            var job = "{\"queue\": \"q\", \"payload\": {\"text\": \"" + text + "\"}}";
            BodyPublisher pieces = BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(job.getBytes()));
            for (var body : List.of(BodyPublishers.ofString(job), pieces)) {
                var request = HttpRequest.newBuilder(URI.create(arguments[0] + "/v1/jobs")).POST(body)
                    .header("Authorization", "Bearer " + arguments[1]).header("Content-Type", "application/json").build();
                var answer = client.send(request, BodyHandlers.ofString());
                System.out.println(answer.statusCode() + " " + answer.body().contains("\"created\":true"));
            }
        }
    }
}
